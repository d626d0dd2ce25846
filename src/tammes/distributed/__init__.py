"""Distributed training: process groups, global batches, prototypes sharded by rows."""
