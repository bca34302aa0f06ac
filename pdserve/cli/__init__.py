"""The `pdserve` command."""

import os

# gRPC's core logs every ended connection at its default level; a stopped worker is no news here.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
