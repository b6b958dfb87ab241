"""An environment as TRL's `environment_factory` takes it: a table, and a tool that looks a value up."""

from __future__ import annotations


class Table:
    """Look up what the prompt names."""

    def reset(self, answer: str, table: dict[str, str], **row: object) -> None:
        """Begin with a table."""
        self.answer = answer
        self.table = table
        self.reward = 0.0

    def look(self, key: str) -> str:
        """Look up what belongs to a key.

        Args:
            key: a letter
        """
        self.reward = float(self.table[key] == self.answer)
        return self.table[key]
