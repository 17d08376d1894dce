"""How a run stands on a disk or in a bucket: its paths, publishing once, files that grow by lines, leases."""
