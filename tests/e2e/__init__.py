"""The whole program, as processes and real sockets."""
