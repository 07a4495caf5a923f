"""The API through Quart's test client and over real sockets, on the memory engine."""
