"""A job that ends in an error, for the demo's own clean-up."""

from __future__ import annotations

raise SystemExit("the job fails as it was told to")
