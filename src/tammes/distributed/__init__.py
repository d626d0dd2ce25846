"""Several processes: process groups, global batches, prototypes sharded by rows."""
