"""HTTP/1.1 server and pooled client on asyncio protocols, and the SSE scanner."""
