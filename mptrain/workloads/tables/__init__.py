"""Tables: rows of numbers and categories, of files or of pandas, whose columns become the inputs of a network."""
