"""One token of Ray for all pools of the test process: importing this module sets it in the environment.

Ray reads its token once, when it is first imported; whoever imports Ray in a test imports this module before it.
"""

import os
import secrets

os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
