"""What clients and managers of dictionaries agree on: the dialect of their requests, and the errors in it.

Owns no more than that. Layout, handshake and connections are those of `ml_flashpoint.net`. On a Unix socket each side
also checks that the other runs as the same user; on TCP each message carries a code.
"""

from __future__ import annotations

from typing import Final

from ml_flashpoint.ddict import errors as ddict_errors
from ml_flashpoint.ddict.errors import DDictError, DDictTimeoutError
from ml_flashpoint.format import errors as core_errors
from ml_flashpoint.net.messages import Dialect, errors_of

REQUESTS: Final = Dialect(
    purpose=b"ml_flashpoint.ddict requests",
    errors=errors_of(core_errors, ddict_errors),
    failure=DDictError,
    timeout=DDictTimeoutError,
)

describe_error = REQUESTS.describe
rebuild_error = REQUESTS.rebuild
