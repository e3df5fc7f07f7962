"""Everything that speaks SQL: SQLite and PostgreSQL, synchronous SQLAlchemy Core. Nobody else writes SQL."""
