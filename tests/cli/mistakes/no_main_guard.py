# python {}
import gradsync as gs


def train():
    pass


gs.launch(train, nprocs=1)
