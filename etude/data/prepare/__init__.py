"""Published data sets, and problems that are made up, as the files that a run reads: `etude data prepare NAME`.

    base.py          what every preparation is; problems by chance, each only once
    raw.py           raw files: found, told apart by split, read row by row
    write.py         rows become Parquet files, the same bytes for the same rows

and a file for each set. Nothing is fetched, and nothing is guessed: a row that cannot be used is left out and counted
by its reason, a file that is not what it should be is refused with its name and its row.
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
    """The preparation of this name."""
    if name not in PREPARATIONS:
        suggestions = get_close_matches(name, PREPARATIONS, n=1)
        hint = f" Did you mean {suggestions[0]}?" if suggestions else ""
        raise UnknownChoiceError(
            f"There is no data set '{name}' to prepare.{hint} There are {', '.join(PREPARATIONS)}. Files of your own "
            f"need no preparation where `data.columns` can name their columns."
        )
    return PREPARATIONS[name]
