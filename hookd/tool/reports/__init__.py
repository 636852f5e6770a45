"""Reports on a target, as data and as text. Runs in the tool and in the target, so it needs only the standard library."""
