"""Another program uses the port: python examples/failures/port_taken.py"""

import socket

import gradsync as gs

PORT = 4242


@gs.launcher(n_gpus=2, port=PORT)  # without `port=` a free port is used
def train():
    return gs.get_communicator().rank


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", PORT)):
        try:
            train()
        except gs.RendezvousError as error:
            print(error)
