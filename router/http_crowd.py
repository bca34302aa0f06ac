"""Who is connected to a listener, and who has to go when there are too many.

    newcomer --> waits for its client --a whole request is here--> in work --answered--> waits
        |           `- the one that has waited longest is dropped when somebody comes and no place is free
        `- every place is in work: turned away; there are as many such places, and the longest goes for the next

So clients that connect and say nothing push each other out, and whoever sends its request at once gets an answer.
"""

from __future__ import annotations

from typing import Protocol


class Connection(Protocol):
    def drop(self) -> None:
        """Ends it at once, without a word."""
        ...


class Crowd:
    """The connections of one listener, on its event loop: at most `limit` with a place, and as many turned away."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_work: set[Connection] = set()
        # Dictionaries for their order: whoever has been there longest is first.
        self._waiting: dict[Connection, None] = {}
        self._turned_away: dict[Connection, None] = {}

    def come(self, newcomer: Connection) -> bool:
        """Whether it gets a place. Otherwise it is to be told that there is none."""
        all_in_work = len(self._in_work) >= self._limit
        where = self._turned_away if all_in_work else self._waiting
        while len(where) + (0 if all_in_work else len(self._in_work)) >= self._limit:
            longest = next(iter(where))
            del where[longest]
            longest.drop()
        where[newcomer] = None
        return not all_in_work

    def work(self, one: Connection) -> None:
        """Its request is here."""
        if one in self._waiting:
            del self._waiting[one]
            self._in_work.add(one)

    def wait(self, one: Connection) -> None:
        """Its request has been answered."""
        if one in self._in_work:
            self._in_work.discard(one)
            self._waiting[one] = None

    def leave(self, one: Connection) -> None:
        """Idempotent."""
        self._in_work.discard(one)
        self._waiting.pop(one, None)
        self._turned_away.pop(one, None)

    def drop_all(self) -> None:
        for one in (*self._waiting, *self._in_work, *self._turned_away):
            self.leave(one)
            one.drop()
