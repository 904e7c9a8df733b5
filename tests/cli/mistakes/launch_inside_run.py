# gradsync run -n 1 --backend local {}
import gradsync as gs


def train():
    pass


if __name__ == "__main__":
    gs.launch(train, nprocs=2)
