"""How gRPC is set up here: settings, servers, channels, deadlines, processes, and error <-> status."""

import os

# gRPC's core writes lines of its own to standard error, and reads this only when it is loaded.
# What matters comes back as an error: a port in use is then one line, not two.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
