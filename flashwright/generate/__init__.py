"""`flashwright generate`: a run as data, its folder, its stages, a run replayed from its record."""
