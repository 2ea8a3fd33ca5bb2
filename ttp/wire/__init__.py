"""Messages on the wire: protobuf and its conversion, channels, token, TLS."""
