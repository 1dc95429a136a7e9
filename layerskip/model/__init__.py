"""The model, cut at the exit: layers [0:E) and [E:L) as views of its own forward, and the cache they share."""
