"""Measurements that anybody can repeat. Each module is a command: python -m fluxbatch.bench.NAME; LOG.md holds what was learnt."""
