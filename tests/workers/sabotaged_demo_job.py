"""The demo's job with a loader that loses its place by one batch when it is put back: what the demo must notice."""

from __future__ import annotations

from ml_flashpoint.cli.demo import job
from ml_flashpoint.cli.demo.text import TextLoader


class ForgetfulLoader(TextLoader):
    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict({"position": state["position"] - 1})


if __name__ == "__main__":
    job.TextLoader = ForgetfulLoader
    job.main()
