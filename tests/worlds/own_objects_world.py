"""A user's environments. They run in a process of their own, which imports this module alone: no JAX."""

from __future__ import annotations


class Calculatrice:
    """A calculator that is asked in French."""

    language = "fr"

    def __init__(self, a: int, b: int, kind: str = "") -> None:
        self.question, self.answer, self.id = f"Combien font {a} plus {b} ?", a + b, f"{a}+{b}"
        if kind:
            self.kind = kind

    def additionner(self, a: int, b: int) -> int:
        """Additionne deux nombres."""
        return a + b

    def score(self, episode) -> float:
        if "refuse" in self.question and episode.answer:
            raise ArithmeticError("nobody knows")
        return float(str(self.answer) in episode.answer)


class Guessed:
    """Half of the policy's episodes look, and what then becomes of them is `becomes`."""

    question = "How many bolts are there?"

    def __init__(self, becomes: str) -> None:
        self.becomes = becomes

    def stock_of(self, item: str) -> int:
        """Pieces of an item in stock."""
        return 40

    def score(self, episode) -> float:
        if self.becomes == "unscored" and episode.calls:
            raise KeyError("no such row")
        return float("40" in episode.answer)
