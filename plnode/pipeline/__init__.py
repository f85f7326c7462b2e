"""Microbatches through the stages: their ledger, their next hop, how many are under way."""
