"""Python runs this at the start of each process that has this folder in its PYTHONPATH; it does something only in those that
Spark starts, and there only if the test has a fork server. Owns no behaviour.
"""

from __future__ import annotations

import fork_client

if fork_client.is_of_spark():
    fork_client.hand_over()
