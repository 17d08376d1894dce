"""The outputs as parameters of tests that take each in turn, and minutes in all: folders are left to `make slow`."""

import pytest

THREE_OUTPUTS = ("parquet", "webdataset", pytest.param("folder", marks=pytest.mark.slow))
