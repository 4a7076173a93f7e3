"""What was said, kept: one folder for each exchange with a model, for people and for a replay.

    model/run.json           who was asked for which stage, with what budget, and how it ended
    model/sketch.1.01/       the first candidate's first attempt at the sketch:
      prompt.md, reply.md      as a person reads them
      exchange.json            the same as data: question, reply, tokens, seconds
      findings.md              what was wrong with it, as the model was told
      outcome.json             whether it was taken, and the digest of what was made of it
      chosen                   this is the one that the stage ended with

An exchange is on the disk before anything is made of it, so that nothing paid for is lost. A run
that was cut off goes on from there: the same questions get the answers that they got. Where a
question has changed since, the answers from there on are kept under another name (`sketch.1.01-1`).

All of it is within the run's folder: a link there leads to nothing that is read or written.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from flashwright.author.llm.model import Message, Model, NoAnswer, Question, Reply, Usage
from flashwright.author.llm.model import transcript as as_markdown
from flashwright.files import cannot, sha256, write

SCHEMA = 1
FOLDER = "model"
RUN = "run.json"
EXCHANGE, OUTCOME, CHOSEN = "exchange.json", "outcome.json", "chosen"
BEFORE = "outcome-before.json"
"""In a replay: what became of the reply then."""
IMPROVE = "improve"
"""The stage that comes after a run is right, of so many rounds as are asked for."""
ATTEMPT = re.compile(r"(?P<stage>[a-z]+)\.(?P<candidate>\d+)\.(?P<number>\d+)")


Known = Literal["nothing", "open", "ended", "another"]


@dataclass(frozen=True)
class Exchange:
    """A question and its reply."""

    question: Question
    reply: Reply

    def dump(self) -> str:
        """As JSON."""
        told = {"schema": SCHEMA, "question": asdict(self.question), "reply": asdict(self.reply)}
        return json.dumps(told, indent=1, ensure_ascii=False) + "\n"


def read(path: Path) -> Exchange | None:
    """An exchange from its file; None where it is not whole."""
    try:
        told = json.loads(_bytes(path))
        question, reply = told["question"], told["reply"]
        question.pop("temperature", None)  # older records have one
        messages = tuple(Message(**m) for m in question.pop("messages"))
        usage = Usage(**reply.pop("usage"))
        return Exchange(Question(messages, **question), Reply(**reply, usage=usage))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass
class Lane:
    """One candidate's attempts at a stage. As a Model it asks, and keeps what is said.

    What the record holds already is not asked again. Without a model behind it (a replay) there is
    nothing else; the question may then differ from the recorded one, which `changed` tells.
    """

    folder: Path
    stage: str
    candidate: int
    model: Model | None
    number: int = 0
    changed: list[str] = field(default_factory=list)
    repeated: int = 0
    """How many of the replies came from the record."""
    again: bool = False
    """Whether the last one did."""

    @property
    def name(self) -> str:
        """The model's."""
        return self.model.name if self.model else "the record"

    @property
    def grammars(self) -> bool:
        """The model's."""
        return self.model.grammars if self.model else False

    @property
    def here(self) -> Path:
        """The folder of the present attempt."""
        return self.folder / f"{self.stage}.{self.candidate}.{self.number:02}"

    def ask(self, question: Question) -> Reply:
        """The recorded reply, or the model's, which is then recorded."""
        self.number += 1
        known = read(self.here / EXCHANGE)
        # By its words: a limit depends on the budget, a grammar on whether the server said in time
        # that it takes one.
        same = known is not None and known.question.messages == question.messages
        if known is not None and (same or self.model is None):
            if not same:
                self.changed.append(self.here.name)
            self.repeated, self.again = self.repeated + 1, True
            _unlink(self.here)
            return known.reply
        if self.model is None:
            self.number -= 1
            raise NoAnswer(f"the record of {self.stage} ends after {self.number} replies")
        try:
            reply = self.model.ask(question)
        except BaseException:
            self.number -= 1
            raise
        self.again = False
        self._keep(Exchange(question, reply))
        return reply

    def _keep(self, exchange: Exchange) -> None:
        self._clear()
        _make(self.here)
        _put(self.here, EXCHANGE, exchange.dump())  # the first: it is what a run goes on from
        _put(self.here, "prompt.md", as_markdown(exchange.question.messages))
        _put(self.here, "reply.md", exchange.reply.text)

    def _clear(self) -> None:
        """Set aside what an earlier run had from here on: its conversation was another one."""
        for path in sorted(self.folder.glob(f"{self.stage}.{self.candidate}.*")):
            name = ATTEMPT.fullmatch(path.name)
            if name and int(name["number"]) >= self.number:
                set_aside(path)

    @property
    def before(self) -> dict[str, Any]:
        """In a replay, what became of the last reply when it was recorded."""
        try:
            told: dict[str, Any] = json.loads(_bytes(self.here / BEFORE))
            return {"taken": bool(told["taken"]), "findings": str(told["findings"])}
        except (OSError, ValueError, KeyError, TypeError):
            return {"taken": False, "findings": ""}

    def outcome(self, taken: bool, findings: str, files: Mapping[str, str | bytes]) -> None:
        """What became of the last reply."""
        _make(self.here)
        for name, data in files.items():
            _put(self.here, name, data)
        if findings:
            _put(self.here, "findings.md", findings)
        digests = {name: sha256(data) for name, data in files.items()}
        told = {"schema": SCHEMA, "taken": taken, "findings": findings, "artefacts": digests}
        _put(self.here, OUTCOME, json.dumps(told, indent=1, ensure_ascii=False) + "\n")


def mark_chosen(folder: Path) -> None:
    """Say that a stage ended with this attempt, and with no other."""
    stage = folder.name.partition(".")[0]
    for other in folder.parent.glob(f"{stage}.*/{CHOSEN}"):
        other.unlink(missing_ok=True)
    _make(folder)
    _put(folder, CHOSEN, "")


def was_chosen(folder: Path) -> bool:
    """Whether the record says so."""
    return (folder / CHOSEN).is_file()


@dataclass(frozen=True)
class Transcript:
    """All that is recorded of a run, in its folder `model`."""

    folder: Path

    def lane(self, stage: str, candidate: int, model: Model | None) -> Lane:
        """A candidate's attempts at a stage."""
        return Lane(self.folder, stage, candidate, model)

    def begin(self, settings: Mapping[str, Any], fresh: bool = False) -> bool:
        """Open the record for a run with these settings; whether it goes on from an earlier one.

        One that came out right, or of another run, is set aside under the next free name. But one
        that came out right may be improved later, and on: it goes on with that stage.
        """
        resumed = not fresh and self.known(settings) == "open"
        if os.path.lexists(self.folder) and not resumed:
            set_aside(self.folder)
        if resumed and not _rounds(settings):  # what it will make comes without them
            for path in self.folder.glob(f"{IMPROVE}.*"):
                if ATTEMPT.fullmatch(path.name):
                    set_aside(path)
        _make(self.folder)
        self._write(settings, "")
        return resumed

    def known(self, settings: Mapping[str, Any]) -> Known:
        """What the record has of a run with these settings."""
        told = self.read()
        if told is None:
            return "nothing"
        if _first(told["settings"]) != _first(settings):
            return "another"
        more = _rounds(settings) > _rounds(told["settings"])
        return "open" if more or not told["ended"] else "ended"

    def end(self, how: str) -> None:
        """The run has come to its end."""
        known = self.read()
        if known is not None:
            self._write(known["settings"], how)

    def read(self) -> dict[str, Any] | None:
        """run.json; None where there is none, or no whole one."""
        try:
            told: dict[str, Any] = json.loads(_bytes(self.folder / RUN))
            return {"settings": dict(told["settings"]), "ended": str(told["ended"])}
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def attempts(self) -> list[tuple[str, int, int, Exchange]]:
        """All exchanges: stage, candidate, number."""
        found = []
        for path in sorted(self.folder.glob(f"*/{EXCHANGE}")):
            name, exchange = ATTEMPT.fullmatch(path.parent.name), read(path)
            if name and exchange:
                place = name["stage"], int(name["candidate"]), int(name["number"])
                found.append((*place, exchange))
        return found

    def _write(self, settings: Mapping[str, Any], ended: str) -> None:
        told = {"schema": SCHEMA, "settings": dict(settings), "ended": ended}
        _put(self.folder, RUN, json.dumps(told, indent=1, ensure_ascii=False) + "\n")


def _first(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without what comes after the run is right."""
    asked = {s: who for s, who in settings.get("asked", {}).items() if s != IMPROVE}
    return {**settings, "asked": asked}


def _rounds(settings: Mapping[str, Any]) -> int:
    """How many rounds of improving are asked for."""
    rounds = settings.get("asked", {}).get(IMPROVE, {}).get("rounds")
    return rounds if isinstance(rounds, int) else 0


# --- files ------------------------------------------------------------------------------------


def set_aside(path: Path) -> None:
    """Give a folder the next free name of NAME-1, NAME-2 and so on."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}-{number}")):
        number += 1
    try:
        path.rename(aside)
    except OSError as error:
        raise cannot("use", path, error) from None


def _make(folder: Path) -> None:
    try:
        if folder.is_symlink():
            folder.unlink()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot("use", folder, error) from None


def _unlink(folder: Path) -> None:
    """Take the links away: what is made of a reply is written here by others, who follow them."""
    try:
        for path in [p for p in folder.rglob("*") if p.is_symlink()]:
            path.unlink()
    except OSError as error:
        raise cannot("use", folder, error) from None


def _put(folder: Path, name: str, data: str | bytes) -> None:
    """Write a file in the place of whatever has its name: `write` would follow a link."""
    path = folder / name
    try:
        if path.is_symlink():
            path.unlink()
    except OSError as error:
        raise cannot("write", path, error) from None
    write(path, data)


def _bytes(path: Path) -> bytes:
    """What a file of the record holds; OSError where it, or its folder, is a link."""
    if path.is_symlink() or path.parent.is_symlink():
        raise FileNotFoundError(path)
    return path.read_bytes()
