"""The processes of one run: which one this is, one a device of this machine, and how they look as one."""
