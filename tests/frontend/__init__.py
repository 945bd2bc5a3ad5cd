"""Tests of v0.1's front: text streams, transport, request validation, processes and the HTTP server."""
