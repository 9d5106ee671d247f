package braid.clients.v5;

/** Work on a thread of its own, whose failure is not lost. */
final class Background {
    private final Thread thread;
    private volatile Exception failure;

    interface Work {
        void run() throws Exception;
    }

    private Background(Work work) {
        thread = new Thread(() -> {
            try {
                work.run();
            } catch (Exception trouble) {
                failure = trouble;
            }
        }, "background");
        thread.start();
    }

    static Background start(Work work) {
        return new Background(work);
    }

    /** Whether it still runs; throws what made it fail. */
    boolean isRunning() throws Exception {
        if (failure != null) {
            throw failure;
        }
        return thread.isAlive();
    }

    void finish(long seconds) throws Exception {
        thread.join(seconds * 1000);
        World.need(!isRunning(), "it was not done within %d seconds", seconds);
    }
}
