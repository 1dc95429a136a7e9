"""A call from its arguments to its last token: the session, the loop, stops, streams, statistics."""
