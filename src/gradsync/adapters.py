"""Tells who imports this module of 0.2 what to write instead. It goes in 0.4, with words.REMOVED."""

from gradsync.words import no_module

no_module("adapters")
