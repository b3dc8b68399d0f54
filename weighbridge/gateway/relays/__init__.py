"""Several relay processes in front of one Router process.

A relay does all that is done per byte; the Router's process does what must be one per fleet. Between the two runs a
Unix socket: events go up, actions come down, each pass of an event loop in one frame.
"""
