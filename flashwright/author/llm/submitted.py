"""A program that its author hands in, as a Model: a person or an agent that asks for nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashwright.author.llm.budget import Unusable
from flashwright.author.llm.model import Question, Reply


@dataclass
class Submission:
    """Replies with one program. The findings go to its author, who may hand in another one."""

    name: str
    source: str
    grammars: bool = False
    is_used: bool = field(default=False, init=False)

    def ask(self, question: Question) -> Reply:
        """The program; Unusable if it was wrong."""
        if self.is_used:
            help = "mend what was found, and submit the program again: attempts are kept in `model`"
            raise Unusable("the program that was submitted is wrong", help=help)
        self.is_used = True
        return Reply(f"```tl\n{self.source.rstrip()}\n```\n", model=self.name)
