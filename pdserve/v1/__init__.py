"""Generated protobuf and gRPC stubs of proto/pdserve/v1; made by `make stubs`, never edited."""
