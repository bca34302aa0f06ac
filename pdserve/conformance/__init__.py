"""Drives a decode worker with good and hostile handoffs and judges what it does, case by case.

Everything here is a client: it knows the worker by its address and docs/protocol.md only.
"""
