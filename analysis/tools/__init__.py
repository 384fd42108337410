"""What makes the documents' tables, and what looks at the code itself: compiled kernels, mutations."""
