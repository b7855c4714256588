"""What the decode loop passes to a streamer besides the tokens."""

from __future__ import annotations

from transformers.generation.streamers import BaseStreamer


class DraftStreamer(BaseStreamer):
    """A streamer that is told which tokens were drafted.

    Attributes:
        from_draft: for each row whether the token that ``put`` gets was drafted and accepted; empty where that is not
            known, as in calls that are left to plain ``generate``.
    """

    def __init__(self) -> None:
        self.from_draft: list[bool] = []
