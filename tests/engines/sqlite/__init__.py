"""Tests of the embedded engine: row format, migrations, lock, recovery, group commit."""
