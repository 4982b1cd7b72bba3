"""Lets these tests use the helpers of the unit tests, also when they alone are run."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "unit"))
