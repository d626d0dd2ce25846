"""Charts: what each figure shows, independent of the library that draws it."""
