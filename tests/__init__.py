"""Tests, laid out like src. `tests.support` is the harness that they share."""
