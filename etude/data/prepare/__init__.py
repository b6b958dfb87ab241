"""The preparation of published and synthetic data sets as the files that a run reads: `etude data prepare NAME`.

A preparation downloads nothing and guesses nothing. It leaves a row that cannot be used out and counts it with the
reason. It refuses a file of another format, and names the file and the row.
"""

from __future__ import annotations

from etude.data.prepare.base import Preparation
from etude.data.prepare.write import PreparedFiles, prepare_dataset

__all__ = ["Preparation", "PreparedFiles", "prepare_dataset"]
