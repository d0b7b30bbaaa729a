"""The HTTP payloads, shared by the gateway and by the batch doors: the same body means the same request."""
