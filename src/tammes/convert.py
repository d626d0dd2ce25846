"""Load heads trained with other libraries."""
