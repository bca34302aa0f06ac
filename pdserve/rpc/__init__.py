"""How gRPC is set up here: settings, servers, channels, deadlines, and error <-> status."""
