"""The preparation of published and synthetic data sets as the files that a run reads: `etude data prepare NAME`.

    base.py          the base of all preparations; random problems without duplicates
    raw.py           raw files: their search, their splits, their rows
    write.py         rows → Parquet files, the same bytes for the same rows

and a file for each data set. A preparation downloads nothing and guesses nothing. It leaves a row that cannot be used
out and counts it with the reason. It refuses a file of another format, and names the file and the row.
"""

from __future__ import annotations

from difflib import get_close_matches

from etude.data.prepare.arithmetic import ArithmeticPreparation
from etude.data.prepare.base import Preparation, SkippedRows
from etude.data.prepare.countdown import CountdownPreparation
from etude.data.prepare.gsm8k import Gsm8kPreparation
from etude.data.prepare.instructions import InstructionPreparation
from etude.data.prepare.maths import MathPreparation
from etude.data.prepare.preferences import PreferencePreparation
from etude.data.prepare.write import PreparedFiles, prepare_dataset
from etude.errors import UnknownChoiceError

__all__ = ["PREPARATIONS", "Preparation", "PreparedFiles", "SkippedRows", "find_preparation", "prepare_dataset"]

PREPARATIONS: dict[str, type[Preparation]] = {
    "gsm8k": Gsm8kPreparation,
    "math": MathPreparation,
    "countdown": CountdownPreparation,
    "arithmetic": ArithmeticPreparation,
    "instructions": InstructionPreparation,
    "preferences": PreferencePreparation,
}


def find_preparation(name: str) -> type[Preparation]:
    """Return the preparation of this name."""
    if name not in PREPARATIONS:
        suggestions = get_close_matches(name, PREPARATIONS, n=1)
        hint = f" Did you mean {suggestions[0]}?" if suggestions else ""
        raise UnknownChoiceError(
            f"There is no data set '{name}' to prepare.{hint} There are {', '.join(PREPARATIONS)}. Files of your own "
            f"need no preparation if `data.columns` can name their columns."
        )
    return PREPARATIONS[name]
