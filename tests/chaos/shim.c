/* Preloaded into workers: shifts their wall clock, and throttles what they read from one folder.
 *
 * Both are told by a page that the chaos run shares with them, so that a fault starts and ends at once in
 * processes that run already. The monotonic clock is left alone, as a clock that is set leaves it alone.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define PIECE ((size_t)1 << 20)
#define BILLION 1000000000LL

struct control {
    volatile int64_t clock_shift_ns;
    volatile int64_t pause_us; /* for each MiB */
};

static struct control *control;
static const char *folder;
static size_t folder_length;
static int (*real_gettime)(clockid_t, struct timespec *);
static ssize_t (*real_read)(int, void *, size_t);

__attribute__((constructor)) static void begin(void) {
    real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    real_read = dlsym(RTLD_NEXT, "read");
    const char *path = getenv("CHAOS_CONTROL");
    folder = getenv("CHAOS_FOLDER");
    if (path == NULL || folder == NULL)
        return;
    folder_length = strlen(folder);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    void *page = mmap(NULL, sizeof(struct control), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (page != MAP_FAILED)
        control = page;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (real_gettime == NULL)
        real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int done = real_gettime(clock, now);
    if (done == 0 && control != NULL && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t shift = control->clock_shift_ns;
        if (shift != 0) {
            int64_t total = now->tv_sec * BILLION + now->tv_nsec + shift;
            now->tv_sec = total / BILLION;
            now->tv_nsec = total % BILLION;
        }
    }
    return done;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec precise;
    int done = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return done;
}

time_t time(time_t *out) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (out != NULL)
        *out = precise.tv_sec;
    return precise.tv_sec;
}

ssize_t read(int fd, void *buffer, size_t count) {
    if (real_read == NULL)
        real_read = dlsym(RTLD_NEXT, "read");
    if (control != NULL && control->pause_us > 0 && count > 0) {
        char link[64], path[4096];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(link, path, sizeof path);
        if (length > (ssize_t)folder_length && memcmp(path, folder, folder_length) == 0) {
            if (count > PIECE)
                count = PIECE; /* a short read, as slow disks give them */
            ssize_t got = real_read(fd, buffer, count);
            if (got > 0) {
                struct timespec pause = {0, 0};
                int64_t us = control->pause_us * got / (int64_t)PIECE + 500;
                pause.tv_sec = us / 1000000;
                pause.tv_nsec = us % 1000000 * 1000;
                nanosleep(&pause, NULL);
            }
            return got;
        }
    }
    return real_read(fd, buffer, count);
}
