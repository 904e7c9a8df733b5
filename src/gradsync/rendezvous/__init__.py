"""Rendezvous: the TCP server and client through which ranks find each other and agree on ids."""
