"""Why a call failed."""

from __future__ import annotations

from typing import Optional


class EbbError(Exception):
    """`ebbd` refused a request or failed, or it cannot be reached."""

    def __init__(
        self,
        sentence: str,
        status: Optional[int] = None,
        code: Optional[str] = None,
        hint: Optional[str] = None,
    ) -> None:
        super().__init__(sentence if hint is None else f"{sentence}: {hint}")
        self.sentence = sentence
        """One line: what is wrong, and often what to do."""
        self.status = status
        """HTTP status; None: there was no answer."""
        self.code = code
        """Why, for programs; None: there was no answer, or an `ebbd` that gives no codes."""
        self.hint = hint
        """What to do; None: the sentence says it, or nothing can be done."""
