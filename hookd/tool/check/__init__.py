"""The static checks of `hookd plugin check`. They parse a plugin's source and import neither the plugin nor torch."""
