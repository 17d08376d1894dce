"""The outputs as parameters of tests that take each in turn, and minutes in all: the rest is left to `make slow`."""

import pytest

THREE_OUTPUTS = ("parquet", "webdataset", pytest.param("folder", marks=pytest.mark.slow))
ONE_OUTPUT = ("parquet", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("webdataset", "folder")))
