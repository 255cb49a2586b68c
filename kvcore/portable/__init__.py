"""What leaves a cache: rows in canonical form as a blob, as a snapshot file, or as pages that another process pulls."""
