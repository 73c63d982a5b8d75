/* Stands in for libnvinfer, libnvinfer_plugin and libnvonnxparser, so that the real Python bindings of
 * TensorRT load without the 2.7 GB of the libraries, and without a GPU. Nothing can be built or run: every
 * factory gives a null pointer. What can be checked is what the bindings offer, and how they call back. */
#include <stddef.h>
#include <stdint.h>

#define NOTHING(name) void *name(void) { return NULL; }

NOTHING(createInferRefitter_INTERNAL)
NOTHING(createInferRuntime_INTERNAL)
NOTHING(createNvOnnxParserRefitter_INTERNAL)
NOTHING(createNvOnnxParser_INTERNAL)
NOTHING(getBuilderPluginRegistry)
NOTHING(getPluginRegistry)

int32_t getNvOnnxParserVersion(void) { return 0; }
int initLibNvInferPlugins(void *logger, const char *space) { (void)logger; (void)space; return 0; }

/* What the real library does first: it says something to the logger, by the logger's own table. Entries 0 and 1
 * are those of its interface, 2 and 3 destructors. */
enum { LOG = 4 };
typedef void (*log_function)(void *self, int32_t severity, const char *text);

void *createInferBuilder_INTERNAL(void *logger, int32_t version) {
    (void)version;
    (*(log_function **)logger)[LOG](logger, 2, "said by the library");
    return NULL;
}

/* What the library does while it runs a plan whose output sizes depend on values. Entry 4 is the older form. */
enum { REALLOCATE_OUTPUT_ASYNC = 5, NOTIFY_SHAPE = 6 };
typedef struct { int32_t count; int64_t sizes[8]; } dims;
typedef void *(*reallocate_function)(void *, const char *, void *, uint64_t, uint64_t, void *);
typedef void (*notify_function)(void *, const char *, const dims *);

void *ask_output_allocator(void *allocator) {
    const dims shape = {2, {5, 6}};
    void **table = *(void ***)allocator;
    void *memory = ((reallocate_function)table[REALLOCATE_OUTPUT_ASYNC])(allocator, "y", (void *)1, 2, 3, (void *)4);
    ((notify_function)table[NOTIFY_SHAPE])(allocator, "y", &shape);
    return memory;
}
